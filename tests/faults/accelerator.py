"""Steps that take as long as those of an accelerator, and as little of the processors.

On a machine with two cores, a model that computes on them has no time left for the HTTP process and the clients, and
what is timed is how the kernel shares cores out. Beside an accelerator the engine waits while that computes.
"""

from hex_llm import faults

STEP_S = 0.02
AS_ON_AN_ACCELERATOR = {faults.VARIABLE: f"engine.step:sleep{STEP_S}"}
IN_WORDS = f"with steps of {1000 * STEP_S:.0f} ms"
