"""The checks of the labs' exercises: one file for each lab.

In reading order:

    lab_1  two namespaces, and when to distribute
    lab_2  all-reduce by hand
    lab_3  synchronous means waiting
    lab_4  central storage
    lab_5  the parameter server, and what it costs not to wait
    lab_6  a model that no worker can hold
    lab_7  the same strategies in TensorFlow
    lab_8  things break
    lab_9  choose a strategy blind, predict what it achieves, and be scored
    graduate/  labs 10 to 13
"""
