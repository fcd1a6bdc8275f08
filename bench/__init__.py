"""Speed, each figure beside its baseline in the same run: the machines are shared and noisy.

    samples.py     what was measured, and the row it makes
    baseline.py    an unsandboxed ipykernel, driven by jupyter_client
    cold_start.py  from `Sandbox()` to the result of 1+1
    __main__.py    the command

Sample and baseline alternate, so that a busy moment hits both; p50 and minimum are to be quoted.
"""
