"""Runs on other machines: under torchrun, in a batch job, in another cluster's pods.

In reading order:

    control      how does a run in another process receive a stop
    frames       how do a run's files travel, through ssh or as marked lines of a log
    places       the place of a followed run: a folder, a host, a command's output
    earlier      files of a job's earlier starts
    conductor    the process next to rank 0 that writes a job's records
    followed     a run whose history comes from such a place
    platforms/   how does each platform start, name and end a job
    submitted    the submitted jobs of this user
    progress     reports of a job's progress to Kubeflow
    telling      the output of the shell's commands about runs, for people and programs
    here         `workbench run`, the processes of a run on this machine
    command      the shell's commands for jobs
"""
