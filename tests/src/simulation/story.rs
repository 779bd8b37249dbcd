//! What happened, one line for each change of state, so that a run that fails can be read.

use super::clock::Micros;

/// A run's lines, if it is told at all: most runs pass, and nobody reads them.
#[derive(Debug, Default)]
pub(super) struct Story {
    told: bool,
    lines: Vec<String>,
}

impl Story {
    pub(super) fn new(told: bool) -> Self {
        Self { told, lines: Vec::new() }
    }

    pub(super) fn is_told(&self) -> bool {
        self.told
    }

    pub(super) fn line(&mut self, now: Micros, text: &str) {
        let (ms, us) = (now / 1000, now % 1000);
        self.lines.push(format!("{ms:>8}.{us:03} ms  {text}"));
    }

    pub(super) fn into_lines(self) -> Vec<String> {
        self.lines
    }
}

/// Adds a line to the world's story; what it says is only made up if the story is told.
macro_rules! tell {
    ($world:expr, $($text:tt)*) => {
        if $world.story.is_told() {
            let text = format!($($text)*);
            $world.story.line($world.clock.now(), &text);
        }
    };
}

pub(super) use tell;
