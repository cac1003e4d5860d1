"""The weight transfer from a trainer to vLLM engines. Depends on torch and vllm.

The path of a weight: the backend cuts its model into buckets and fills them one after another with full tensors
(``buckets.py``: ``TensorBuckets`` for DeepSpeed; ``megatron/model/weights.py``: ``FullWeights``). A sender calls the
engine's actor, once or for each bucket, and the actor calls vLLM's workers (``collective_rpc``). The sender moves the
buckets to them across a process boundary (``sender.py``: ``WeightSender`` from rank 0 to engines on other GPUs,
``ColocatedSender`` from every rank to the engines on its own GPU; ``transports.py``: broadcast or shared memory).
There ``receiver.py`` passes each tensor to the model's ``load_weights``. If checksums are requested, ``receipts.py``
reports to the sender what arrived.
"""
