mod api_budget;

use super::leader::changes;
use crate::event_loop::UserCommand;
use crate::kube::anchor::DesiredState;

#[test]
fn each_request_is_passed_on_once() {
    let none = DesiredState::default();
    let four = DesiredState { num_workers: Some(4), ..none };
    let stop = DesiredState { stop: true, ..four };
    assert_eq!(changes(none, four), [UserCommand::Scale(4)]);
    assert_eq!(changes(four, four), []);
    assert_eq!(changes(four, stop), [UserCommand::Stop]);
    assert_eq!(changes(none, stop), [UserCommand::Scale(4), UserCommand::Stop]);
    assert_eq!(changes(stop, none), []);
    let asked = DesiredState { checkpoint: Some(7), ..four };
    assert_eq!(changes(four, asked), [UserCommand::Checkpoint]);
    assert_eq!(changes(asked, asked), []);
    let [suspended, resumed] =
        [true, false].map(|suspend| DesiredState { suspend: Some(suspend), ..four });
    assert_eq!(changes(four, suspended), [UserCommand::Suspend]);
    assert_eq!(changes(suspended, suspended), []);
    assert_eq!(changes(suspended, resumed), [UserCommand::Resume]);
}
