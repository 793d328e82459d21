"""DeepSpeed: the config of an engine, and what its stages and options need.

config_file      ds_config.json and its monitors
operators        DeepSpeed's compiled operators: built once, then loaded
adam             the optimizer
zero3            what is not whole on a device: ZeRO-3, offloads, tensor parallelism
ema              --enable_ema: an average of the weights
throughput       tokens, FLOPs, learning rate and gradient norm of a step
patches          repairs of libraries, each with the version that needs it
"""
