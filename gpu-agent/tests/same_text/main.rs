//! The proof that a moved page is the right page.
fn main() {}
