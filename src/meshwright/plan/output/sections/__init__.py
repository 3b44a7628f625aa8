"""The sections of a plan's page, one file each."""
