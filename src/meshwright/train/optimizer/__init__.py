"""The update of the parameters: clipping, the optimizer's update, Muon, and the moving average."""
