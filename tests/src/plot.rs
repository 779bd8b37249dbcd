//! Curves over a common axis, as SVG.

use std::fmt::Write as _;

/// A plot whose axes begin at 0.
#[derive(Clone, Debug, Default)]
pub struct Plot {
    /// Title, which also names the curves.
    pub title: String,
    /// Text at the end of the horizontal axis.
    pub end: String,
    /// Decimals of the largest value, which is written beside the vertical axis.
    pub decimals: usize,
    /// Curves; later ones are drawn over earlier ones.
    pub curves: Vec<Curve>,
}

/// A curve of a plot.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Points, by their first coordinate.
    pub points: Vec<(f64, f64)>,
    /// Colour, as SVG has it.
    pub color: &'static str,
    /// Width of the line.
    pub width: f64,
    /// Lengths of dashes and gaps; `None` for a solid line.
    pub dashes: Option<&'static str>,
}

impl Plot {
    /// The plot as an SVG document.
    #[must_use]
    pub fn to_svg(&self) -> String {
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let last = points().map(|point| point.0).fold(f64::MIN_POSITIVE, f64::max);
        let highest = points().map(|point| point.1).fold(f64::MIN_POSITIVE, f64::max);
        let bottom = HEIGHT + TOP;
        let mut svg = format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="sans-serif"
     font-size="13">
<rect width="100%" height="100%" fill="#fff"/>
<path d="M{LEFT} {TOP}V{bottom}H{WIDTH}" fill="none" stroke="#888"/>
"##,
            WIDTH + 20.0,
            bottom + 30.0,
        );
        for Curve { points, color, width, dashes } in &self.curves {
            let mut line = String::new();
            for (x, y) in points {
                let x = LEFT + (WIDTH - LEFT) * x / last;
                let y = HEIGHT * (1.0 - y / highest) + TOP;
                let _ = write!(line, "{x:.1},{y:.1} ");
            }
            let dashes =
                dashes.map(|of| format!(r#" stroke-dasharray="{of}""#)).unwrap_or_default();
            let style = format!(r#"fill="none" stroke="{color}" stroke-width="{width}"{dashes}"#);
            let _ = writeln!(svg, r#"<polyline points="{line}" {style}/>"#);
        }
        let texts = [
            (LEFT, 16.0, self.title.clone()),
            (4.0, TOP + 6.0, format!("{highest:.0$}", self.decimals)),
            (28.0, bottom, "0".into()),
            (WIDTH - 60.0, bottom + 20.0, self.end.clone()),
        ];
        for (x, y, text) in texts {
            let text = text.replace('&', "&amp;").replace('<', "&lt;");
            let _ = writeln!(svg, r#"<text x="{x}" y="{y}">{text}</text>"#);
        }
        svg + "</svg>\n"
    }
}

const LEFT: f64 = 50.0;
const TOP: f64 = 30.0;
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_values_are_at_the_ends_of_the_axes() {
        let curve = |points| Curve { points, color: "#000", width: 1.0, dashes: Some("6 4") };
        let plot = Plot {
            title: "a < b".into(),
            end: "10 s".into(),
            decimals: 1,
            curves: vec![curve(vec![(0.0, 0.0), (10.0, 4.0)]), curve(vec![(5.0, 2.0)])],
        };
        let svg = plot.to_svg();
        assert!(svg.contains(r#"points="50.0,330.0 720.0,30.0 ""#), "{svg}");
        assert!(svg.contains(r#"points="385.0,180.0 ""#), "{svg}");
        assert!(svg.contains(">a &lt; b<") && svg.contains(">4.0<") && svg.contains(">10 s<"));
        assert!(svg.contains(r#"stroke-dasharray="6 4""#), "{svg}");
    }
}
