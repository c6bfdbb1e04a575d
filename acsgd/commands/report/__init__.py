"""`acsgd report`: what runs have written, as one HTML page. uPlot draws the charts; its licence is beside it."""
