//! Which workers are equal: until there is a group, those that the same has happened to.
//!
//! Afterwards their ranks tell them apart: the lowest one speaks for the group, and each has its
//! place in the ring.

use std::collections::{BTreeSet, HashMap};

use super::explored::Choice;
use super::state::event::Event;
use super::state::network::Host;
use super::timeless::Timeless;
use super::world::World;

/// The histories of hosts, and what a search has tried for one of each history.
#[derive(Debug, Default)]
pub(super) struct Alike {
    histories: HashMap<Host, Timeless>,
    tried: BTreeSet<(u64, Choice)>,
    /// Number of choices that were left out.
    pub(super) left_out: u64,
}

impl Alike {
    /// The choices before `event`, without those that were tried for an equal worker.
    pub(super) fn choices(&mut self, world: &World, event: &Event) -> Vec<Choice> {
        let mut choices = world.choices(event);
        if let Some(host) = concerned(world, event).filter(|_| world.oracle.published.is_empty()) {
            let history = self.histories.get(&host).map_or(0, Timeless::number);
            let all = choices.len();
            choices.retain(|choice| self.tried.insert((history, choice.of_any())));
            self.left_out += (all - choices.len()) as u64;
        }
        choices
    }

    /// A choice is made for a worker.
    pub(super) fn note_choice(&mut self, choice: Choice) {
        if let Some(host) = choice.worker() {
            self.histories.entry(host).or_default().add(&choice.of_any());
        }
    }

    /// An event happens.
    pub(super) fn note(&mut self, world: &World, event: &Event) {
        if let Some(host) = concerned(world, event).filter(|_| world.oracle.published.is_empty()) {
            let packet = match *event {
                Event::Arrive { link, to } => world.net.link(link).directions[to].in_flight.front(),
                _ => None,
            };
            let mut text = format!("{event:?} {packet:?}");
            text.retain(|letter| !letter.is_ascii_digit());
            self.histories.entry(host).or_default().add(&text);
        }
    }
}

/// The worker that an event concerns.
fn concerned(world: &World, event: &Event) -> Option<Host> {
    match *event {
        Event::Arrive { link, .. } => world.net.link(link).ends.into_iter().max(),
        _ => event.runs_in().map(|p| p + 1),
    }
}
