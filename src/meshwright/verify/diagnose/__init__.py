"""Why a placed step differs from one device: likely causes, found in numbers and in the program."""
