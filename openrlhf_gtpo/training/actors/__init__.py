"""Actors that hold a model and train it: policy and critic, on DeepSpeed or Megatron-core."""
