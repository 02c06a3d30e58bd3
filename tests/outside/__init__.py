"""What others wrote, run with and without offloading: PyTorch's operations and modules, Hugging Face's architectures.

A sample of each runs with the other tests. All of them run by command, from the repository's root; each command writes
a record into ``results/``::

    python -m tests.outside operations
    python -m tests.outside architectures
    python -m tests.outside programs
    python -m tests.outside trainings
    python -m tests.outside budgets

What is compared is the same bit for bit, or PyTorch itself does not repeat it.
"""
