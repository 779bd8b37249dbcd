mod api_budget;

use super::submitted::next_incarnation;

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
