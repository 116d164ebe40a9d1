"""Check the installation, the GPUs and the kernels of this machine: `python -m gptjax.doctor`.

machine.py reads facts of the machine, checks.py compares the facts with requirements, and
kernels.py runs the kernels. No module imports JAX before the check of the versions, because the
import fails with a wrong jaxlib.
"""
