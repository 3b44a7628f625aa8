"""The record of the rows that a run used: `journal` writes it, `audit` checks it."""
