"""How fast is it here? ``python -m benchmarks`` prints figures of this machine.

Figures of different machines do not compare; ratios of one run do. Nothing here is a test.
"""
