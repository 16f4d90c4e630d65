"""Runs on other machines: under torchrun, in a batch job, in another cluster's pods.

In reading order:

    control      how is a run in another process told to stop
    frames       how do a run's files travel, through ssh or as marked lines of a log
    places       where is a run that is followed: a folder, a host, a command's output
    earlier      what a job's earlier starts have left
    conductor    the process beside rank 0 that keeps a job's records
    followed     a run whose history comes from such a place
    platforms/   how does each platform start, name and end a job
    submitted    the jobs that this user has submitted
    progress     what Kubeflow is told of a job
    telling      what do the shell's commands say of runs, to people and programs
    here         `workbench run`: the processes of a run on this machine
    command      the shell's commands for jobs
"""
