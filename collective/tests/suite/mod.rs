//! The conformance suite as tests.

/// Defines one test module per backend.
macro_rules! conforms {
    ($backend:ident, $exact:expr, $form:expr) => {
        mod $backend {
            use super::*;
            use elasticdl_collective::testing::conformance;

            #[test]
            fn sums_are_exact_and_identical_on_every_rank() {
                conformance::sums_are_exact_and_identical_on_every_rank(&$form, $exact);
            }

            #[test]
            fn nan_and_infinity_have_the_same_bits_on_every_rank() {
                conformance::nan_and_infinity_have_the_same_bits_on_every_rank(&$form);
            }

            #[test]
            fn exchanges_deliver_every_payload() {
                conformance::exchanges_deliver_every_payload(&$form);
            }

            #[test]
            fn parts_are_summed_where_they_belong() {
                conformance::parts_are_summed_where_they_belong(&$form);
            }

            #[test]
            fn any_sequence_of_operations_is_correct() {
                conformance::any_sequence_of_operations_is_correct(&$form);
            }

            #[test]
            fn a_rank_that_leaves_after_an_operation_does_not_fail_the_others() {
                conformance::a_rank_that_leaves_after_an_operation_does_not_fail_the_others(&$form);
            }

            #[test]
            fn a_rank_that_ends_at_any_point_ends_all_without_wrong_results() {
                conformance::a_rank_that_ends_at_any_point_ends_all_without_wrong_results(&$form);
            }

            #[test]
            fn a_waiting_rank_can_be_aborted() {
                conformance::a_waiting_rank_can_be_aborted(&$form);
            }

            #[test]
            fn a_disagreement_fails_every_rank() {
                conformance::a_disagreement_fails_every_rank(&$form);
            }

            #[test]
            fn an_invalid_call_changes_nothing() {
                conformance::an_invalid_call_changes_nothing(&$form);
            }
        }
    };
}
