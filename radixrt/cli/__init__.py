"""The ``radixrt`` command and its flags."""
