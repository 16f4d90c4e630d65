"""What the kernel's interrupt waits for."""

from workbench.session import halting, interrupts, task


def test_an_interrupt_is_waited_for_until_an_engine_that_nobody_hears_has_been_ended():
    # It has left its cell as agreed, but its answer is lost: the controller is halted, say.
    longest_s = halting.CLEAR_S + task.KILL_S + task.HEARD_S
    assert longest_s < interrupts.SETTLE_S < 30
