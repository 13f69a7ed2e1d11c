"""Exchanges: how payloads reach the other ranks. Only these modules communicate."""
