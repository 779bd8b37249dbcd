//! The suite, as tests.

/// One module of tests per backend.
macro_rules! conforms {
    ($backend:ident, $exact:expr, $form:expr) => {
        mod $backend {
            use super::*;
            use elasticdl_collective::conformance;

            #[test]
            fn sums_are_exact_and_the_same_everywhere() {
                conformance::sums_are_exact_and_the_same_everywhere(&$form, $exact);
            }

            #[test]
            fn numbers_that_are_none_are_the_same_everywhere() {
                conformance::numbers_that_are_none_are_the_same_everywhere(&$form);
            }

            #[test]
            fn any_sequence_does_what_it_says() {
                conformance::any_sequence_does_what_it_says(&$form);
            }

            #[test]
            fn who_leaves_after_an_operation_takes_nothing_from_the_others() {
                conformance::who_leaves_after_an_operation_takes_nothing_from_the_others(&$form);
            }

            #[test]
            fn a_rank_that_ends_at_any_point_ends_all_and_fakes_nothing() {
                conformance::a_rank_that_ends_at_any_point_ends_all_and_fakes_nothing(&$form);
            }

            #[test]
            fn any_group_sums_right_or_ends() {
                conformance::any_group_sums_right_or_ends(&$form);
            }

            #[test]
            fn who_waits_can_be_aborted() {
                conformance::who_waits_can_be_aborted(&$form);
            }

            #[test]
            fn who_disagrees_fails_with_all() {
                conformance::who_disagrees_fails_with_all(&$form);
            }

            #[test]
            fn a_senseless_call_changes_nothing() {
                conformance::a_senseless_call_changes_nothing(&$form);
            }
        }
    };
}
