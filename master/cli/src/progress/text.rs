//! Numbers and texts as they are shown to the user.

/// `text` as one line without control characters. Texts also come from workers, and no escape
/// sequence of theirs may reach the terminal.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Formats a rate with three or four digits.
pub(crate) fn format_rate(rate: f64) -> String {
    match rate {
        r if r >= 1e9 => format!("{:.2} G", r / 1e9),
        r if r >= 1e6 => format!("{:.2} M", r / 1e6),
        r if r >= 1e4 => format!("{:.1} k", r / 1e3),
        r if r >= 100.0 => format!("{r:.0}"),
        r => format!("{r:.1}"),
    }
}

/// Formats a learning rate with up to three digits.
pub(crate) fn format_learning_rate(rate: f64) -> String {
    let rounded: f64 = format!("{rate:.2e}").parse().unwrap_or(rate);
    let is_plain = rounded == 0.0 || (1e-4..1e4).contains(&rounded.abs());
    if is_plain { rounded.to_string() } else { format!("{rounded:e}") }
}

/// Formats a duration in seconds with one or two units.
pub(crate) fn format_duration(seconds: f64) -> String {
    let seconds = seconds.clamp(0.0, SECONDS_MAX).round() as u64;
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    match seconds {
        0..100 => format!("{seconds} s"),
        100..6000 => format!("{minutes} min"),
        6000..172_800 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{} d {} h", hours / 24, hours % 24),
    }
}

const SECONDS_MAX: f64 = 1e12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learning_rates_and_durations_are_short() {
        let rates = [0.001, 0.1, 0.000_123_456, 1.234_56e-7, 0.0, 12.0, 1.0 / 3.0, f64::NAN];
        let texts = ["0.001", "0.1", "0.000123", "1.23e-7", "0", "12", "0.333", "NaN"];
        assert_eq!(rates.map(format_learning_rate), texts);
        let seconds = [0.4, 99.0, 100.0, 5999.0, 6000.0, 172_800.0, f64::INFINITY, f64::NAN];
        let texts =
            ["0 s", "99 s", "1 min", "99 min", "1 h 40 min", "2 d 0 h", "11574074 d 1 h", "0 s"];
        assert_eq!(seconds.map(format_duration), texts);
    }
}
