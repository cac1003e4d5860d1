"""What holds a model and trains it: policy and critic, on DeepSpeed or Megatron-core."""
