mod api_budget;

use super::leader::changes;
use super::submitted::next_incarnation;
use crate::event_loop::UserCommand;
use crate::job::Scaling;
use crate::kube::anchor::{DesiredState, StopRequest};

#[test]
fn an_incarnation_that_a_user_has_edited_never_falls_below_that_of_the_lease() {
    let next = |text: Option<&str>, transitions| {
        next_incarnation(text.map(str::to_owned).as_ref(), transitions)
    };
    assert_eq!(next(None, 0), 1);
    assert_eq!(next(Some("4"), 3), 5);
    for edited in [None, Some(""), Some("abc"), Some("1")] {
        assert_eq!(next(edited, 3), 4, "{edited:?}");
    }
    // The Lease was deleted, and made again.
    assert_eq!(next(Some("4"), 0), 5);
}

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
    let asked = DesiredState { checkpoint: Some(7), ..four };
    assert_eq!(changes(four, asked), [UserCommand::Checkpoint]);
    assert_eq!(changes(asked, asked), []);
    let [suspended, resumed] =
        [true, false].map(|suspend| DesiredState { suspend: Some(suspend), ..four });
    assert_eq!(changes(four, suspended), [UserCommand::Suspend]);
    assert_eq!(changes(suspended, suspended), []);
    assert_eq!(changes(suspended, resumed), [UserCommand::Resume]);
}
