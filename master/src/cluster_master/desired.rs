//! What users request of a running job through the keys of its anchor: each request once.

use crate::event_loop::UserCommand;
use crate::job::Scaling;
use crate::kube::anchor::{self, Data, DesiredState, StopRequest};
use crate::kube::requests::UserRequest;

/// The requests that this master has passed on.
#[derive(Debug)]
pub(super) struct KnownRequests {
    desired: DesiredState,
    by: Option<UserRequest>,
    ignored: Option<String>,
    /// Whether the anchor has been read.
    is_read: bool,
}

/// What is new in the anchor.
#[derive(Debug, Default, PartialEq)]
pub(super) struct NewRequests {
    pub(super) commands: Vec<UserCommand>,
    /// The user of the newest request.
    pub(super) by: Option<UserRequest>,
    /// What is wrong with a request.
    pub(super) ignored: Option<String>,
    /// Number of a request to say what the workers do.
    pub(super) inspect: Option<u64>,
}

impl KnownRequests {
    /// Those of a master whose predecessors have carried out `scaling`.
    pub(super) fn new(scaling: Scaling) -> Self {
        let desired = DesiredState { scaling, ..DesiredState::default() };
        Self { desired, by: None, ignored: None, is_read: false }
    }

    /// What is new in `data`.
    pub(super) fn on_data(&mut self, data: &Data) -> NewRequests {
        let mut new = NewRequests::default();
        let by = UserRequest::in_anchor(data);
        if let Some(by) = by.filter(|by| self.by.as_ref() != Some(by)) {
            // A user may request the same number again, after another cause has changed it.
            if self.is_read {
                self.desired.scaling = self.desired.scaling.without(by.scaling());
            }
            self.by = Some(by.clone());
            new.by = Some(by);
        }
        let ignored = anchor::ignored_request(data);
        new.ignored = ignored.clone().filter(|_| ignored != self.ignored);
        self.ignored = ignored;
        let now = DesiredState::read(data);
        // A request that a former master has got is not answered again.
        new.inspect = now.inspect.filter(|_| self.is_read && now.inspect != self.desired.inspect);
        new.commands = changes(self.desired, now);
        (self.desired, self.is_read) = (now, true);
        new
    }
}

/// Commands to the master that follow from a change of the desired state.
fn changes(before: DesiredState, now: DesiredState) -> Vec<UserCommand> {
    let scaling = now.scaling.since(before.scaling);
    let scale = (scaling != Scaling::default()).then_some(UserCommand::Scale(scaling));
    let weight = now.weight.filter(|_| now.weight != before.weight).map(UserCommand::Weigh);
    let suspend = now.suspend.filter(|_| now.suspend != before.suspend);
    let suspend = suspend.map(|suspend| match suspend {
        true => UserCommand::Suspend,
        false => UserCommand::Resume,
    });
    let stop = now.stop.filter(|_| now.stop > before.stop);
    let stop = stop.map(|stop| match stop {
        StopRequest::AtStep => UserCommand::Stop,
        StopRequest::AtOnce => UserCommand::Kill,
    });
    let asked = now.checkpoint.is_some() && now.checkpoint != before.checkpoint;
    let checkpoint = asked.then_some(UserCommand::Checkpoint);
    // New workers have the new weight.
    weight.into_iter().chain(scale).chain(checkpoint).chain(suspend).chain(stop).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::priority_tiers::parse_weight;
    use crate::kube::requests::REQUESTED_BY;

    #[test]
    fn each_request_is_passed_on_once() {
        let none = DesiredState::default();
        let four = DesiredState { scaling: 4.into(), ..none };
        let stop = DesiredState { stop: Some(StopRequest::AtStep), ..four };
        assert_eq!(changes(none, four), [UserCommand::Scale(4.into())]);
        assert_eq!(changes(four, four), []);
        assert_eq!(changes(four, stop), [UserCommand::Stop]);
        // The number is not requested again with a limit: a policy may have changed it since.
        let most = Scaling { max_workers: Some(9), ..Scaling::default() };
        let limited = DesiredState { scaling: most.or(four.scaling), ..four };
        assert_eq!(changes(four, limited), [UserCommand::Scale(most)]);
        assert_eq!(changes(none, limited), [UserCommand::Scale(limited.scaling)]);
        assert_eq!(changes(none, stop), [UserCommand::Scale(4.into()), UserCommand::Stop]);
        assert_eq!(changes(stop, none), []);
        let forced = DesiredState { stop: Some(StopRequest::AtOnce), ..stop };
        assert_eq!(changes(stop, forced), [UserCommand::Kill]);
        assert_eq!(changes(forced, stop), []);
        let heavy = parse_weight("2").ok();
        let commands = [UserCommand::Weigh(heavy.unwrap()), UserCommand::Scale(4.into())];
        assert_eq!(changes(none, DesiredState { weight: heavy, ..four }), commands);
        let asked = DesiredState { checkpoint: Some(7), ..four };
        assert_eq!(changes(four, asked), [UserCommand::Checkpoint]);
        assert_eq!(changes(asked, asked), []);
        let [suspended, resumed] =
            [true, false].map(|suspend| DesiredState { suspend: Some(suspend), ..four });
        assert_eq!(changes(four, suspended), [UserCommand::Suspend]);
        assert_eq!(changes(suspended, suspended), []);
        assert_eq!(changes(suspended, resumed), [UserCommand::Resume]);
    }

    /// An anchor in which a user has requested this number of workers.
    fn scaled(num_workers: &str, at_ms: u64) -> Data {
        let keys: Data = [("num-workers".to_owned(), num_workers.to_owned())].into();
        let (key, value) = keys.clone().pop_last().unwrap();
        let by = UserRequest { user: "jane".into(), key, value, with: Data::new(), at_ms };
        keys.into_iter().chain([(REQUESTED_BY.into(), by.to_json())]).collect()
    }

    #[test]
    fn the_next_master_carries_out_no_number_again_and_a_user_may_request_it_again() {
        let mut first = KnownRequests::new(Scaling::default());
        let new = first.on_data(&scaled("4", 1));
        assert_eq!(new.commands, [UserCommand::Scale(4.into())]);
        assert_eq!(new.by.map(|by| by.at_ms), Some(1));
        assert_eq!(first.on_data(&scaled("4", 1)), NewRequests::default());
        assert_eq!(first.on_data(&scaled("4", 2)).commands, [UserCommand::Scale(4.into())]);
        let mut next = KnownRequests::new(4.into());
        assert_eq!(next.on_data(&scaled("4", 2)).commands, []);
        assert_eq!(next.on_data(&scaled("4", 3)).commands, [UserCommand::Scale(4.into())]);
        // Requested while there was no master.
        let mut next = KnownRequests::new(4.into());
        assert_eq!(next.on_data(&scaled("5", 4)).commands, [UserCommand::Scale(5.into())]);
    }

    #[test]
    fn an_unusable_request_is_told_once_and_one_to_a_former_master_is_not_answered() {
        let data = |number: &str| {
            let pairs = [("num-workers", "many"), ("inspect", number)];
            pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
        };
        let mut known = KnownRequests::new(Scaling::default());
        let new = known.on_data(&data("1"));
        assert!(new.ignored.is_some_and(|text| text.contains("many")));
        assert_eq!((new.inspect, new.commands), (None, vec![]));
        let new = known.on_data(&data("2"));
        assert_eq!((new.ignored, new.inspect), (None, Some(2)));
    }
}
