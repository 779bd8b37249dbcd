"""The lighthouse of torchft, which takes its options from the command line."""

from torchft._torchft import lighthouse_main

lighthouse_main()
