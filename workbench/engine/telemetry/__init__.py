"""How a step is measured, held back and reported.

In reading order:

    recorder      how does a step become a row
    step_gate     may the next step begin, and which fault is injected before it
    membership    who takes part from the next step on
    departure     what does a process do that is told to end
    notices       who says that a host goes away soon
    profiler      how is a window of steps profiled
    control_link  how do rows and events reach the kernel, and its orders the engine
"""
