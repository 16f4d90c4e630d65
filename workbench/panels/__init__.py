"""`wb.panel()`: the workbench with the mouse. One model per notebook, any number of widgets."""
