//! The trace of a run: one line per state change, so that a run that fails can be read.

use super::clock::Micros;

/// The lines of a run, if tracing is enabled: most runs pass, and need no trace.
#[derive(Debug, Default)]
pub(super) struct Trace {
    enabled: bool,
    lines: Vec<String>,
}

impl Trace {
    pub(super) fn new(enabled: bool) -> Self {
        Self { enabled, lines: Vec::new() }
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.enabled
    }

    pub(super) fn line(&mut self, now: Micros, text: &str) {
        let (ms, us) = (now / 1000, now % 1000);
        self.lines.push(format!("{ms:>8}.{us:03} ms  {text}"));
    }

    pub(super) fn into_lines(self) -> Vec<String> {
        self.lines
    }
}

/// Adds a line to the world's trace. The text is only formatted if tracing is enabled.
macro_rules! trace {
    ($world:expr, $($text:tt)*) => {
        if $world.trace.is_enabled() {
            let text = format!($($text)*);
            $world.trace.line($world.clock.now(), &text);
        }
    };
}

pub(super) use trace;
