"""``python -m benchmarks`` measures the speed on this machine.

Results of different machines cannot be compared, but ratios within one run can. The benchmarks are
not tests.
"""
