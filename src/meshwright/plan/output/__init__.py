"""Plans shown: tables, commands, comparisons and pages."""
