"""Check of the installation, the GPUs and the kernels of this machine: `python -m gptjax.doctor`.

No module imports JAX before the check of the versions: the import fails with a wrong jaxlib.
"""
