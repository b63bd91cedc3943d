"""Many ranks as one: exchanges between them, who owns which card, and how they are started.

Layer: torch.distributed only, plain arguments, no config object. A run on one process passes through the same calls.
Mesh: ranks stand in a grid, data x branch. `rank = data_rank * branch_size + branch_rank`.
Shapes: P pairs, R ranks of a branch group.
"""
