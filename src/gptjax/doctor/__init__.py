"""Check the installation, the GPUs and the kernels of this machine: `python -m gptjax.doctor`.

machine.py reads what the machine has, checks.py judges it, kernels.py runs the kernels. Nothing
here imports JAX before the versions are checked: with a wrong jaxlib the import fails.
"""
