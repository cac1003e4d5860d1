"""The weight transfer from a trainer to vLLM engines. Depends on torch and vllm.

The path of a weight: the backend cuts its model into buckets and fills them one after another with full tensors
(``buckets.py``: ``TensorBuckets`` for DeepSpeed; ``megatron/model/weights.py``: ``FullWeights``). A sender calls the
engine's actor, once or for each bucket, and that passes the call on to vLLM's workers (``collective_rpc``). The sender
takes the buckets to them across a process boundary (``sender.py``: ``WeightSender`` from rank 0 to engines on other
GPUs, ``ColocatedSender`` from every rank to the engines on its own; ``transports.py``: broadcast or shared memory).
There ``receiver.py`` hands each tensor to the model's ``load_weights`` and, if checksums are requested,
``receipts.py`` tells the sender what arrived.
"""
