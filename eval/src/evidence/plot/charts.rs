//! Two kinds of charts.

use crate::evidence::EvidenceError;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;
use std::fmt::Display;

const SIZE: (u32, u32) = (560, 330);
/// Height of a row of the legend, pixels.
const LEGEND_ROW: i32 = 20;
/// About the width of a letter of the legend, pixels.
const LETTER: u32 = 7;
/// Width of a legend's sample, pixels.
const SAMPLE: i32 = 26;
const TEXT: u32 = 13;
/// Colours of lines and parts, from dark to light so that they differ in grey too.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 0, 0),
    RGBColor(178, 24, 43),
    RGBColor(33, 113, 181),
    RGBColor(230, 145, 30),
    RGBColor(120, 190, 150),
    RGBColor(205, 205, 205),
];
/// Length and gap of dashes, pixels; a gap of 0 is a solid line.
const DASHES: [(u32, u32); 6] = [(1, 0), (9, 4), (3, 3), (14, 6), (5, 8), (2, 7)];

/// How an axis runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Evenly.
    Linear,
    /// By powers of ten.
    Log,
}

/// A named line.
#[derive(Clone, Debug)]
pub struct Series {
    /// As the legend names it.
    pub name: String,
    /// From left to right.
    pub points: Vec<(f64, f64)>,
}

/// A chart of lines.
#[derive(Clone, Debug)]
pub struct Lines {
    /// What runs to the right, with its unit.
    pub x: &'static str,
    /// What runs up, with its unit.
    pub y: &'static str,
    /// How both run.
    pub scales: (Scale, Scale),
    /// The lines.
    pub series: Vec<Series>,
}

/// A chart of stacked bars.
#[derive(Clone, Debug)]
pub struct Bars {
    /// What the bars' height is, with its unit.
    pub y: &'static str,
    /// Names of the parts, from below.
    pub parts: Vec<String>,
    /// Name and parts of each bar.
    pub bars: Vec<(String, Vec<f64>)>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn failed(error: impl Display) -> EvidenceError {
    EvidenceError::Plot(error.to_string())
}

/// Draws the legend at the top of `root` and gives back what is below it.
fn legend<'a>(root: &Area<'a>, names: &[&str], lines: bool) -> Result<Area<'a>, EvidenceError> {
    let (mut x, mut row) = (60, 0);
    for (number, name) in names.iter().enumerate() {
        let width = SAMPLE + 18 + text_width(name).cast_signed();
        if x + width > SIZE.0.cast_signed() && x > 60 {
            (x, row) = (60, row + 1);
        }
        let y = row * LEGEND_ROW + LEGEND_ROW / 2;
        let colour = colour(number);
        if lines {
            let from_to = [(x, y), (x + SAMPLE, y)];
            for piece in dashed(&from_to, number) {
                root.draw(&PathElement::new(piece, colour.stroke_width(2)))
                    .map_err(failed)?;
            }
        } else {
            root.draw(&Rectangle::new([(x, y - 6), (x + SAMPLE, y + 6)], colour.filled()))
                .map_err(failed)?;
        }
        let style = ("sans-serif", TEXT).into_font().color(&BLACK);
        root.draw(&Text::new((*name).to_owned(), (x + SAMPLE + 5, y - 6), style))
            .map_err(failed)?;
        x += width;
    }
    let (_, below) = root.split_vertically((row + 1) * LEGEND_ROW);
    Ok(below)
}

/// About how wide a text is, pixels.
fn text_width(text: &str) -> u32 {
    text.chars().count() as u32 * LETTER
}

fn colour(number: usize) -> RGBColor {
    COLOURS[number % COLOURS.len()]
}

/// The pieces of a straight horizontal line with the dashes of line `number`.
fn dashed(line: &[(i32, i32); 2], number: usize) -> Vec<Vec<(i32, i32)>> {
    let [(from, y), (to, _)] = *line;
    let (dash, gap) = DASHES[number % DASHES.len()];
    if gap == 0 {
        return vec![line.to_vec()];
    }
    let starts = (from..to).step_by((dash + gap) as usize);
    starts
        .map(|x| vec![(x, y), ((x + dash.cast_signed()).min(to), y)])
        .collect()
}

/// A number as an axis shows it.
fn tick(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v >= 1e6 => format!("{}M", value / 1e6),
        v if v >= 1e4 => format!("{}K", value / 1e3),
        v if v < 1e-3 => format!("{value:.0e}"),
        _ => {
            let text = format!("{value:.3}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
    }
}

impl Lines {
    /// The picture.
    ///
    /// # Errors
    /// If it cannot be drawn.
    pub fn svg(&self) -> Result<String, EvidenceError> {
        let mut text = String::new();
        {
            let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
            root.fill(&WHITE).map_err(failed)?;
            let names: Vec<&str> = self.series.iter().map(|s| s.name.as_str()).collect();
            let area = legend(&root, &names, true)?;
            let points = || self.series.iter().flat_map(|s| &s.points);
            let (x, y) = (
                range(points().map(|p| p.0), self.scales.0),
                range(points().map(|p| p.1), self.scales.1),
            );
            match self.scales {
                (Scale::Linear, Scale::Linear) => self.draw(&area, x, y)?,
                (Scale::Linear, Scale::Log) => self.draw(&area, x, y.log_scale())?,
                (Scale::Log, Scale::Linear) => self.draw(&area, x.log_scale(), y)?,
                (Scale::Log, Scale::Log) => self.draw(&area, x.log_scale(), y.log_scale())?,
            }
            root.present().map_err(failed)?;
        }
        Ok(text)
    }

    fn draw<X, Y, XS, YS>(&self, area: &Area<'_>, x: XS, y: YS) -> Result<(), EvidenceError>
    where
        XS: AsRangedCoord<CoordDescType = X, Value = f64>,
        YS: AsRangedCoord<CoordDescType = Y, Value = f64>,
        X: Ranged<ValueType = f64> + ValueFormatter<f64>,
        Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .x_label_area_size(42)
            .y_label_area_size(58)
            .build_cartesian_2d(x, y)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .x_desc(self.x)
            .y_desc(self.y)
            .x_labels(7)
            .y_labels(6)
            .x_label_formatter(&|x| tick(*x))
            .y_label_formatter(&|y| tick(*y))
            .label_style(("sans-serif", TEXT))
            .axis_desc_style(("sans-serif", TEXT))
            .light_line_style(WHITE)
            .bold_line_style(RGBColor(228, 228, 228))
            .draw()
            .map_err(failed)?;
        for (number, series) in self.series.iter().enumerate() {
            let style = colour(number).stroke_width(2);
            let (dash, gap) = DASHES[number % DASHES.len()];
            let points = series.points.iter().copied();
            if gap == 0 {
                chart.draw_series(LineSeries::new(points, style)).map_err(failed)?;
            } else {
                chart
                    .draw_series(DashedLineSeries::new(points, dash, gap, style))
                    .map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// From the least to the largest of `values`; linear axes begin at 0.
fn range(values: impl Iterator<Item = f64>, scale: Scale) -> std::ops::Range<f64> {
    let shown = values.filter(|v| v.is_finite() && (scale == Scale::Linear || *v > 0.0));
    let (mut low, mut high) = shown.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| {
        (low.min(v), high.max(v))
    });
    if scale == Scale::Linear {
        low = low.min(0.0);
        high *= 1.03;
    }
    if low.is_finite() && high > low {
        low..high
    } else if scale == Scale::Log {
        1.0..10.0
    } else {
        0.0..1.0
    }
}

impl Bars {
    /// The picture.
    ///
    /// # Errors
    /// If it cannot be drawn.
    pub fn svg(&self) -> Result<String, EvidenceError> {
        let mut text = String::new();
        {
            let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
            root.fill(&WHITE).map_err(failed)?;
            let names: Vec<&str> = self.parts.iter().map(String::as_str).collect();
            let area = legend(&root, &names, false)?;
            self.draw(&area)?;
            root.present().map_err(failed)?;
        }
        Ok(text)
    }

    fn draw(&self, area: &Area<'_>) -> Result<(), EvidenceError> {
        let heights = self.bars.iter().map(|(_, parts)| parts.iter().sum());
        // Names of bars are set upright where they would touch each other.
        let longest = self.bars.iter().map(|(name, _)| text_width(name)).max().unwrap_or(0);
        let upright = longest as usize * self.bars.len() > SIZE.0 as usize - 90;
        let font = ("sans-serif", TEXT).into_font();
        let font = if upright {
            font.transform(FontTransform::Rotate90)
        } else {
            font
        };
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .x_label_area_size(if upright { 12 + longest } else { 24 })
            .y_label_area_size(58)
            .build_cartesian_2d(0.0..self.bars.len().max(1) as f64, range(heights, Scale::Linear))
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .y_desc(self.y)
            .y_labels(6)
            .x_labels(0)
            .y_label_formatter(&|y| tick(*y))
            .label_style(("sans-serif", TEXT))
            .axis_desc_style(("sans-serif", TEXT))
            .light_line_style(WHITE)
            .bold_line_style(RGBColor(228, 228, 228))
            .draw()
            .map_err(failed)?;
        for (place, (name, parts)) in self.bars.iter().enumerate() {
            let mut below = 0.0;
            for (number, part) in parts.iter().enumerate() {
                let corners = [(place as f64 + 0.15, below), (place as f64 + 0.85, below + part)];
                let filled = Rectangle::new(corners, colour(number).filled());
                let edge = Rectangle::new(corners, BLACK.stroke_width(1));
                if *part > 0.0 {
                    chart.draw_series([filled, edge]).map_err(failed)?;
                }
                below += part;
            }
            let (x, y) = chart.backend_coord(&(place as f64 + 0.5, 0.0));
            let (left, top) = area.get_base_pixel();
            let half = (text_width(name) / 2).cast_signed();
            let at = if upright {
                (x - left + 6, y - top + 6)
            } else {
                (x - left - half, y - top + 6)
            };
            area.draw(&Text::new(name.clone(), at, font.clone().color(&BLACK)))
                .map_err(failed)?;
        }
        Ok(())
    }
}
