"""Output of plans: tables, commands, comparisons and HTML pages."""
