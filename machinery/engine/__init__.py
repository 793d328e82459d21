"""DeepSpeed: the config of an engine, and what its stages and options need.

config_file      ds_config.json and its monitors
adam             the optimizer
zero3            gathering and offloading under ZeRO-3
ema              --enable_ema: an average of the weights
state_offload    --offload_states
tensor_parallel  --tensor_parallel_size
throughput       tokens, FLOPs, learning rate and gradient norm of a step
patches          repairs of libraries, each with the version that needs it
old_deepspeed    what exists for DeepSpeed 0.18.5 alone
"""
