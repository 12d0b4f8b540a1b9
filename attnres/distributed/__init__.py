"""Several processes that train one trial: torchrun, DistributedDataParallel, fully_shard (FSDP2).

`launched` says what torchrun told this process, `parent` is the trial's own process, which starts torchrun,
`agent` is torchrun, `worker` one of its processes, `group` what the training sees of the others, and
`parallel` what is done to model, gradients and checkpoints.
"""
