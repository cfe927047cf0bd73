"""Gives callers with a training loop of their own the functions to run, split and abort a window.

A window is all forward and backward calls whose gradients go into one optimizer step.
"""
