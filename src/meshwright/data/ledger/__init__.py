"""Which rows were used: the journal that a run writes, the audit that reads it, and its report."""
