"""The update of the parameters: its layout, Muon, and the moving average."""
