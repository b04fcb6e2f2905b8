//! The OpenAI-shaped HTTP front of Pinion.
