//! The rules a binding document can break: one line each, with the sub-code and the word that name it.
//!
//! `V-01` to `V-17` are those of the binding specification, several of which cover more than one fault: the word
//! tells them apart. `V-00` and everything from `V-18` on are stricter rules of this project. `docs/bindings.md`
//! lists exactly these rows, which a test keeps true.

use std::fmt;

macro_rules! rules {
    ($($name:ident $code:literal $kind:literal $says:literal;)*) => {
        /// A rule.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)] // each has its sentence in the table
        pub enum Rule { $($name,)* }

        impl Rule {
            /// Every rule, in the order of sub-codes.
            pub const ALL: &'static [Rule] = &[$(Rule::$name,)*];

            /// `V-nn`.
            pub fn sub_code(self) -> &'static str {
                match self { $(Rule::$name => $code,)* }
            }

            /// The word that tells faults of one sub-code apart.
            pub fn kind(self) -> &'static str {
                match self { $(Rule::$name => $kind,)* }
            }

            /// When it is broken, one clause.
            pub fn says(self) -> &'static str {
                match self { $(Rule::$name => $says,)* }
            }
        }
    };
}

rules! {
    Document "V-00" "document_unreadable" "the file is not one plain YAML document of at most 1 MB";
    NotAMapping "V-01" "document_not_a_mapping" "the document is a list, a word or empty";
    MissingField "V-01" "missing_field" "`binding` or `structure` is not there";
    BlankField "V-01" "empty_text" "`binding` or `structure` is blank or no text";
    InvalidName "V-02" "invalid_name" "a name has other characters than `a-z 0-9 _ . -`";
    NameMismatch "V-03" "name_mismatch" "the file is stored under another name than it declares";
    UnknownStructure "V-04" "unknown_structure" "the catalog has no such structure or version";
    RetiredStructure "V-04" "retired_structure" "the pinned version, or every version, is retired";
    InvalidPin "V-04" "invalid_pin" "what stands after `@` is no version";
    CoverageOnRegion "V-05" "coverage_on_region" "a region binding has `coverage`";
    StagesNotAMapping "V-06" "stages_not_a_mapping" "`stages` is not there or no mapping";
    BlankStage "V-06" "empty_text" "a stage's name is blank or no text";
    UnknownStage "V-06" "unknown_stage" "a stage the pipeline does not have";
    MissingStage "V-06" "missing_required_stage" "a required stage is not bound";
    StageNotAMapping "V-06" "stage_not_a_mapping" "a stage's body is no mapping";
    CoverageMissing "V-07" "coverage_missing" "complete coverage is asked for and there is none";
    CoverageNotAMapping "V-08" "coverage_not_a_mapping" "`coverage` is no mapping";
    CoverageKey "V-08" "coverage_unknown_key" "a key of `coverage` that does not exist";
    Contract "V-08" "unsupported_contract" "`contract` is not `complete_hot_path`";
    HotPath "V-09" "hot_path_invalid" "`hot_path` is not there, empty or no list";
    BlankHotPath "V-09" "empty_text" "a name of `hot_path` is blank or no text";
    HotPathTwice "V-09" "hot_path_duplicate" "a name stands in `hot_path` twice";
    Segments "V-10" "segments_invalid" "`segments` is not there, empty or no list";
    SegmentNotAMapping "V-10" "segment_not_a_mapping" "a segment is no mapping";
    SegmentKey "V-10" "segment_unknown_key" "a key of a segment that does not exist";
    BlankSegment "V-10" "empty_text" "name, stage, classification or seam is not there, blank or no text";
    SegmentTwice "V-10" "duplicate_segment" "two segments have one name";
    UnboundStage "V-11" "segment_unbound_stage" "a segment's stage is not bound by this file";
    Classification "V-12" "unknown_classification" "none of structure, state_region, host_stage, control";
    StructuresNotAList "V-13" "structures_not_a_list" "`structures` is empty or no list";
    BlankStructure "V-13" "empty_text" "a name in `structures` is blank or no text";
    StructureTwice "V-13" "repeated_structure" "a name stands in `structures` twice";
    StructureSegmentEmpty "V-14" "structure_segment_empty" "a structure segment names no structure";
    StructuresNotAllowed "V-15" "structures_not_allowed" "a host_stage or control segment names structures";
    SegmentStructure "V-16" "unknown_structure" "a segment names a structure the catalog does not have";
    PipelineEmbedded "V-16" "pipeline_embedded" "a segment names a pipeline";
    NotEmbedded "V-16" "structure_not_embedded" "the pipeline does not embed the structure of a structure segment";
    Unclassified "V-17" "unclassified_hot_path" "a name of `hot_path` has no segment";
    UnknownKey "V-18" "unknown_key" "a key that does not exist there";
    Field "V-19" "field_invalid" "a field is not there, blank or of another type";
    StageField "V-20" "stage_field_invalid" "a field of a stage's body does not exist or has another type";
    Cadence "V-21" "cadence_invalid" "another cadence than request, observation, tick, replan, or a stage that is not bound";
    Dims "V-22" "dims_invalid" "a symbol the structure does not have, or a size that is none";
    Variant "V-23" "variant_invalid" "an axis or a value the structure does not have";
    Dtype "V-24" "dtype_invalid" "none of bf16, f16, f32";
    Weights "V-25" "weights_invalid" "a slot, layout, template, constant or row range that makes no sense";
    Point "V-26" "point_invalid" "a point the structure does not have, or a side that is none";
    HostEntry "V-27" "host_invalid" "a module path or a range of versions that is none";
    MProfile "V-28" "m_profile_invalid" "an m_class other than micro, small, medium, large, or no phase";
    Conditioning "V-29" "conditioning_invalid" "an incomplete projection, or a chunk order that is none";
    ForbiddenKey "V-30" "forbidden_key" "a key that would choose hardware or kernels";
    NameTwice "V-31" "duplicate_name" "two bindings have one name";
    Replaces "V-32" "replaces_invalid" "`replaces` names nothing that is there, or is needed and missing";
    Family "V-33" "family_invalid" "a family file without models or regions, or with a pipeline among them";
    Placement "V-34" "placement_invalid" "on this model: a number, module, parameter or row range that is not there";
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.sub_code(), self.kind())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sub_code_and_a_word_name_one_rule() {
        let mut names: Vec<String> = Rule::ALL.iter().map(ToString::to_string).collect();
        assert!(Rule::ALL.is_sorted_by_key(|r| r.sub_code()));
        names.sort();
        names.dedup();
        assert_eq!(names.len(), Rule::ALL.len());
    }

    #[test]
    fn the_page_lists_every_rule() {
        let page = include_str!("../../../docs/bindings.md");
        for rule in Rule::ALL {
            let row = format!(
                "| `{}` | `{}` | {} |",
                rule.sub_code(),
                rule.kind(),
                rule.says()
            );
            assert!(page.contains(&row), "docs/bindings.md lacks the row\n{row}");
        }
        let rows = page.lines().filter(|l| l.starts_with("| `V-")).count();
        assert_eq!(
            rows,
            Rule::ALL.len(),
            "docs/bindings.md lists a rule that does not exist"
        );
    }
}
