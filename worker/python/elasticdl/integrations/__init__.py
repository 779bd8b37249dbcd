"""Programs with a trainer of another package: ``transformers``, ``accelerate`` and ``lightning``.

Each module is imported by the programs that use it, and needs its package.
"""
