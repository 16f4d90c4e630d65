"""How a step is measured, held back and reported.

In reading order:

    recorder      how does a step become a row
    step_gate     may the next step begin, and which fault is injected before it
    membership    which workers take part from the next step on
    departure     what does a process do when it is told to end
    notices       which notices say that a host will end soon
    profiler      how is a window of steps profiled
    control_link  how do rows and events reach the kernel, and its orders the engine
"""
