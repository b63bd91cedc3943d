"""What the machine did while a run went on: samples of its cards and of this process, every two seconds.

Layer: beside `evidence`; takes plain arguments, imports no torch and no CUDA library of its own accord.
Units: memory in MiB, power in watts, temperature in degrees Celsius, utilisation in percent, time in seconds.
"""
