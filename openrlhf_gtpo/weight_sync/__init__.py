"""The weight transfer from a trainer to vLLM engines. Depends on torch, vllm and ray.

The path of a weight: the backend cuts its model into buckets and fills them one after another with full tensors
(``buckets.py``: ``TensorBuckets`` for DeepSpeed; ``megatron/model/weights.py``: ``FullWeights``). A sender takes the
full buckets (``sender.py``: ``WeightSender`` from rank 0 to engines on other GPUs, ``ColocatedSender`` from every
rank to the engines on its own) across a process boundary (``transports.py``: broadcast or shared memory), and calls
the engine's actor, which passes the call on to vLLM's workers (``collective_rpc``). There ``receiver.py`` hands each
tensor to the model's ``load_weights`` and, if checksums are requested, ``receipts.py`` tells the sender what arrived.
"""
