"""Several HTTP processes, and what they are told when the user says stop."""

import subprocess
import sys

# Other threads run, as with agents or Ray, and the signal comes while nobody waits for one.
SCRIPT = """
import os, signal, threading, time
from hex_llm.process import hold_signals
from hex_llm.server import supervise

class Front:
    pid, returncode = 1, None
    def poll(self): return self.returncode
    def send_signal(self, number):
        print(signal.Signals(number).name)
        self.returncode = 0

class Fleet:
    exit_code = None
    def poll(self, *, restart):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
hold_signals()
supervise._wait([Front()], Fleet(), 1.0)
"""


def test_a_signal_that_another_thread_gets_is_the_users_all_the_same():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "SIGUSR1\n"), done.stderr
