//! Pictures as SVG text: lines and stacked bars, which stay apart without colour (each line has its own dashes, each part
//! of a bar its own lightness), with a legend above, where it covers nothing.

mod charts;
mod pictures;

pub use charts::{Bars, Lines, Scale, Series};
pub use pictures::{Picture, pictures};
